from typing import ClassVar


class RoutingStrategy: ...


class RoutingSimulator:
    strategies: ClassVar[dict] = {}

    @classmethod
    def register_strategy(cls, name: str, strategy: RoutingStrategy) -> None:
        cls.strategies[name] = strategy
