"""Reports and cards: their sections, their templates, their files.

In: tables, images, figures. Out: report.json, report.html and cards, laid out by `templates/`.
Read first: `report.py`, then `templates/page.html.j2`.
"""
