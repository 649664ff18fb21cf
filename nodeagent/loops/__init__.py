"""The agent's periodic jobs, one a file: converge, report, fetch in advance, tidy up."""
