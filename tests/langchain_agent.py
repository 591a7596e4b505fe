"""What `test_langchain_calls_a_tool` runs with an interpreter that has LangChain: a question and a tool, JSON lines."""

import json
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"12 degrees in {city}"


def main(url: str) -> None:
    model = ChatOpenAI(base_url=url, api_key="none", model="nano", temperature=0)
    with_tool = model.bind_tools([weather])
    turns = [HumanMessage("How warm is Oslo?")]
    asked = with_tool.invoke(turns)
    turns += [asked, *(ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in asked.tool_calls)]
    print(json.dumps([call["args"] for call in asked.tool_calls]))
    print(json.dumps(with_tool.invoke(turns).content))
    print(json.dumps("".join(str(chunk.content) for chunk in model.stream("greet me"))))


main(sys.argv[1])
