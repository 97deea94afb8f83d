"""The report of a comparison: reads `results.json`; makes advice, a table, a page and pictures (`drawing/`).

Nothing here depends on models or training: it reports on any file with the schema of `docs/results.md`.
"""
