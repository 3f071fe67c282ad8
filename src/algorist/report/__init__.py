"""The report: one self-contained HTML file of a run.

``collect`` reads the run folder into plain data within a size budget, ``curves`` chooses the charts, ``build`` renders
``report.html.j2`` with ``report.css`` and ``report.js``. Charts are drawn by uPlot 1.6.32 (MIT, ``uplot.LICENSE.txt``),
which is shipped unchanged. Text of models and datasets is data in the page, never markup.
"""
