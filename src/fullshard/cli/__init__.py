"""The ``fullshard`` command.

``launcher/``
    ``fullshard run``: starts ranks on one machine or several, and stops them all when one fails.
``trainer/``
    ``fullshard train``: trains a GPT on every rank; ``training.py`` is made to be copied.
``planner/``
    ``fullshard plan``: predicts the memory that training takes, without allocating it.

The files beside these folders are shared: ``main.py`` lists the commands; ``command_line.py``,
``flags.py`` and ``help_pages.py`` make a command line of them; ``options.py``, ``option_files.py``,
``checks.py`` and ``sharding.py`` read and check the options of a run; ``data.py`` and ``model.py``
are the text and the GPT; ``output.py``, ``problems.py`` and ``words.py`` are for messages.
"""
