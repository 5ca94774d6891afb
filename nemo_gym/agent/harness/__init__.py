"""Agent harnesses that are programs: running a CLI in a box, reading its output, and judging its run.

base        `CliPackage`: what to fetch and mount; `CliHarness`: command line, environment, files, own judgement
events      `EventReader`: parses the CLI's output, line by line, into a `Transcript` of turns, tool calls and usage
run         `run_in_box`: runs one harness in one box within its limits, follows it to its end, and judges the outcome
agent       `CliAgent`: the agent server for a harness, in every topology
provision   fetching CLI packages, and checking whether an image can run them
mcp_tools   tools of MCP servers, for harnesses that run in the agent server
"""

MCP_CONNECT_TIMEOUT_S = 30.0
MCP_READ_TIMEOUT_S = 300.0
"""The limit between two reads: long, as a tool may be silent until it is done. Each call has its own limit too."""
