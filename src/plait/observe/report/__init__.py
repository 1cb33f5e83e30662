"""Pages: one HTML file each that needs nothing else. A section is one function from data to markup;
`page.page` joins them.
"""
