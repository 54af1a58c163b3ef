"""Jobs from Python, and what both the command line and a script do to run one."""
