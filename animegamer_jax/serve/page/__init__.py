"""The page in the browser.

page    sends its files
files/  HTML, style and scripts as they are: there is no build step
"""
