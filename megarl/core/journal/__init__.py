"""The journal: an append-only file of records, from which the controller's whole state follows.

records.py  the records, and the state that follows from them
file.py     how records lie in a file, and where its groups are
journal.py  the files of a run: one writer, readers
writer.py   the thread that writes, behind the event loop
"""
