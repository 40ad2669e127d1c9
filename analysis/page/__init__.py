"""The HTML report: its page, charts, table, verdict and server."""
