"""The page of each artifact and the model card: report.json, templates, report.html.

In: tables, images, figures, HTML of contents. Out: report.json, report.html, Markdown, laid out by `templates/`.
Read first: `report.py`, then `page.py`, `lineage.py` and `templates/page.html.j2`.
"""
