"""``fullshard run``: starts ranks on one machine or several, and stops all when one fails."""
