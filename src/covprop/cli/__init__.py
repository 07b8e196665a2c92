"""The command line: from files to an answer, an exit code and nothing half written."""
