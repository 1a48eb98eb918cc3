"""The checks as pytest suites, foldered by what they check; thin, since the harness does the work."""
