"""The ``fullshard`` command. One file per command; ``launch.py`` starts ranks for all of them."""
