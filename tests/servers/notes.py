"""An environment with tools, for the tests of its two ends. It imports nothing of the MCP library."""

from __future__ import annotations

from typing import ClassVar

from fastapi import FastAPI, Request
from pydantic import BaseModel, Field

from nemo_gym.base_resources_server import SimpleResourcesServer

PARAMS = {"input": [{"role": "user", "content": "hi"}]}


class Note(BaseModel):
    text: str = Field(min_length=1)


class Notes(BaseModel):
    notes: list[str]


class NotesEnvironment(SimpleResourcesServer):
    """Keeps notes in its session."""

    tool_access: ClassVar[tuple[str, ...]] = ("mcp", "http")

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/add_note")(self.add_note)
        app.post("/list_notes")(self.list_notes)
        app.post("/explode")(self.explode)
        app.post("/search/{where}")(self.no_tool)
        return app

    async def add_note(self, request: Request, body: Note) -> Notes:
        """Write a note down."""
        request.session["notes"] = [*request.session.get("notes", []), body.text]
        return await self.list_notes(request)

    async def list_notes(self, request: Request) -> Notes:
        return Notes(notes=request.session.get("notes", []))

    async def explode(self) -> Notes:
        raise RuntimeError("a private path: /var/secret")

    async def no_tool(self, where: str) -> None: ...
