"""Fuzzing of the reader: sound stores are damaged with knowledge of the format, and every read is judged.

::

    python -m thinrow.testing.fuzz --tries 100000 --seed 1

Each try damages one of some small stores of every trait and codec in one of two ways. *Raw*: bytes change as a disk or
a network changes them (flips, cuts, swaps of files); then each read gives the sound data or a typed error, and
``verify`` reports it. *Sealed*: fields get hostile values and every CRC around them is made anew, as a faulty or
malicious writer would; then what is read may be wrong, but no read crashes, hangs, takes memory beyond a bound, touches
a byte outside its buffers, or raises anything but the errors of ``core.errors``. Workers are processes, so that a crash
is one try's failure and not the run's.

Most stores stay open between tries (``standing``) and are read where the damage is (``reads``), which makes a million
tries a matter of half an hour on two cores; three tries in a hundred open a store of their own.

Worked example: try 7 of seed 1 sets ``n_rows`` of a piece record to 4294967295 and mends the CRCs of its page, its
directory and the meta. A read answers ``CorruptionError``: the index names rows beyond the stripe.
"""
