"""HTML pages that load nothing from elsewhere.

A section is a function from data to markup; `page.page` joins the sections to a file.
"""
