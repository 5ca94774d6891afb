"""Controls that confirm a resolved attempt: values recorded in the box, compared outside it.

Code under test shares the test's process and can say of itself whatever it likes. These controls never ask it whether
a test passed. A *rendering* of the row's tests enters the box without anything the tests expect; it records what the
code under test answers, and the environment compares the answers with expectations that never entered the box.
"""
