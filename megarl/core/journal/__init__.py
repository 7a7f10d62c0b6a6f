"""The journal: an append-only file of records, and the only thing a controller has to remember.

records.py  what it records, and the state that follows from the records
file.py     how records lie in a file, and where its groups are
journal.py  the files of a run: one writer, readers
writer.py   the thread that writes, behind the event loop
"""
