"""Agent harnesses that are programs: what a CLI needs to run in a box, and how its run is read and judged.

package     what is fetched and mounted (data)
base        `CliHarness`: command line, environment, files, and the harness's own word on how it ended
events      `EventReader`: the CLI's output, line by line, into a `Transcript`
transcript  `Transcript`: turns, tool calls, usage and timings, the same for every harness
verdict     the typed outcome, from exit status, events and what the doors counted
watch       what ends a run early: its limit of turns, a model that only fails
process     `follow`: a process to its end, read and stopped
run         `run_in_box`: one harness in one box, in bounds
agent       `CliAgent`: the agent server around a harness, in every topology
"""
