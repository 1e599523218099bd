"""What runs have to show, read from their folders: tables, figures, and one page that opens offline.

run_results.py  a run's folder, read and validated: nothing in it is trusted, and nothing is executed
consistency.py  certified ≤ attacked ≤ clean, image by image
published.py    the numbers of the paper, as data
table.py        the summary, as values and as Markdown
series.py       what the page's charts draw
gallery.py      images with their attacks
page.py         one self-contained HTML file
figure.py       the same curves as PNG and PDF, with matplotlib
"""
