"""Reports: pure functions of a record file (terminal, Markdown, HTML, JUnit, before/after tables)."""
