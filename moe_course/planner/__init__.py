"""A plan to look at: its notes, a summary, a table, a document, the decision in sentences; `moe-course plan`."""
