"""One log line for each ticket, at its end, however it ended."""

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.lease import LeaseEvent

logger = logging.getLogger(__name__)

_ENDS = frozenset({"released", "rejected", "timeout", "cancelled"})


class TicketLog:
    """A listener for every lease.

    The fields of a line: id, lease, model, group, mode, waited and ran (seconds), bytes (of the answer), outcome and
    reason. The outcome of a ticket that was served is how its hold ended: done, error, client, max_hold or admin.
    """

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}

    def answered(self, ticket_id: str, count: int) -> None:
        """Add to the bytes of this ticket's answer. Called inside the hold; a ticket that has ended is ignored."""
        if ticket_id in self._bytes:
            self._bytes[ticket_id] += count

    def on_lease_event(self, event: "LeaseEvent") -> None:
        ticket = event.ticket
        if event.kind in ("queued", "granted"):
            self._bytes.setdefault(ticket.id, 0)
        if event.kind not in _ENDS:
            return
        served = event.kind == "released"
        arrived = event.at if ticket.arrived is None else ticket.arrived
        granted = ticket.granted if served and ticket.granted is not None else event.at
        fields = {
            "id": ticket.id,
            "lease": event.lease,
            "model": ticket.model,
            "group": ticket.group,
            "mode": str(ticket.mode),
            "waited": round(granted - arrived, 3),
            "ran": round(event.at - granted, 3),
            "bytes": self._bytes.pop(ticket.id, 0),
            "outcome": event.reason or "done" if served else event.kind,
            "reason": "" if served else event.reason,
        }
        logger.info("ticket ended", extra={"fields": fields})
