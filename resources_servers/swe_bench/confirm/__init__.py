"""Controls that confirm a resolved attempt: values are recorded in the box and compared outside it.

Code under test shares the test's process and can forge any test result, so these controls do not rely on its report
that a test passed. A *rendering* of the row's tests enters the box without the values that the tests expect. It
records the values that the code under test returns (its *answers*), and the environment compares them with
expectations that never enter the box. *Gold* is the repository with the row's own solution, *base* the one without it.
"""
