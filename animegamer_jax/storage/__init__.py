"""Files in local folders and in buckets.

paths           absolute paths, folders that are replaced as a whole, errors in one line
files           atomic writes of single files
locks           one process at a time writes to a folder
untrusted       bounded reads of files that others made
serialization   dataclasses to JSON and back
"""
