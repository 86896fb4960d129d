"""Starting ranks, on one machine or several, and ending all when one fails: ``fullshard run``."""
