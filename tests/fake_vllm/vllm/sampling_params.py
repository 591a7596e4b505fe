class RequestOutputKind:
    CUMULATIVE = 0
