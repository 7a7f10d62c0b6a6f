"""The journal: append-only files of records, from which the controller's whole state
follows.

records.py  the records, and the state that results from applying them
file.py     the format of a file, and the index of its groups
journal.py  the files of a run: one writer, any number of readers
writer.py   a thread that writes, so that the event loop does not wait
"""
