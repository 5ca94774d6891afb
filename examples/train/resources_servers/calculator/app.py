"""Mathematics with a calculator: the environment `math` compares the answer, and two tools add and subtract
whole numbers."""

from __future__ import annotations

from typing import Any, ClassVar

from fastapi import FastAPI
from pydantic import BaseModel, Field

from resources_servers.math.app import MathEnvironment

LARGEST = 10**9


class Operands(BaseModel):
    a: int = Field(ge=-LARGEST, le=LARGEST)
    b: int = Field(ge=-LARGEST, le=LARGEST)


class Result(BaseModel):
    result: int


async def add(body: Operands) -> Result:
    """a + b"""
    return Result(result=body.a + body.b)


async def subtract(body: Operands) -> Result:
    """a - b"""
    return Result(result=body.a - body.b)


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": tool.__name__,
        "description": tool.__doc__,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
        "strict": False,
    }
    for tool in (add, subtract)
]


class CalculatorEnvironment(MathEnvironment):
    """Rows are those of `MathEnvironment`. The prompt is the unchanged question, and the request lists the tools."""

    tool_access: ClassVar[tuple[str, ...]] = ("http",)

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/add")(add)
        app.post("/subtract")(subtract)
        return app

    def public_row(self, row: dict[str, Any]) -> dict[str, Any]:
        public = super().public_row(row)
        messages = [{"role": "user", "content": row["question"]}]
        return {
            **public,
            "responses_create_params": {**public["responses_create_params"], "input": messages, "tools": TOOLS},
        }


if __name__ == "__main__":
    CalculatorEnvironment.run_webserver()
