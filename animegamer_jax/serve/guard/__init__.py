"""What stands before the application.

guard    hosts, limits of a client, sizes of bodies, headers
limits   rates, files that are worked on, uploads
monitor  health, metrics, the log
"""
