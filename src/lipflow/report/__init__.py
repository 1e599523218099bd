"""Compare runs: tables, figures, and one HTML page that opens offline.

run_results.py  read and validate the folder of a run, which may come from a stranger
consistency.py  certified ≤ attacked ≤ clean, image by image
published.py    the numbers of the paper, as data
table.py        the summary, as values and as Markdown
series.py       the data of the charts
gallery.py      images with their attacks
page.py         the HTML page
figure.py       the charts as PNG and PDF, with matplotlib
"""
