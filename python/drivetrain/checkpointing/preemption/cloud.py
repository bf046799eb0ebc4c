"""Asks the metadata services of AWS, Google Cloud and Azure whether they will take this machine away."""

import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Protocol

from ...threads import Thread

_logger = logging.getLogger("drivetrain")
_ANSWER_SECONDS = 2.0  # limit of one request
_POLL_SECONDS = 5.0  # AWS recommends it
_FAILURES_BEFORE_WARNING = 3


class Source(Protocol):
    """One service that announces preemptions."""

    def notice(self) -> str | None:
        """Returns what was announced, or None. Takes a few seconds at most.

        Raises:
            OSError: The service does not answer.
            ValueError: The answer has an unknown form.
        """


class _Service:
    """A metadata service at a URL, which tests replace."""

    url = "http://169.254.169.254"

    def __init__(self, url: str | None = None) -> None:
        self._url = url or self.url
        self._known = ""  # the token or the machine's name, once the service has told it

    def _ask(self, path: str, headers: dict[str, str], method: str = "GET") -> str:
        request = urllib.request.Request(self._url + path, headers=headers, method=method)
        with _opener.open(request, timeout=_ANSWER_SECONDS) as answer:
            text: str = answer.read().decode()
            return text


class Aws(_Service):
    """Spot interruption notices of EC2, two minutes ahead (instance metadata service, version 2).

    Format: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    """

    def notice(self) -> str | None:
        """Returns the action and its time, such as "terminate at 2026-01-01T00:00:00Z"."""
        for attempt in range(2):
            if not self._known:
                ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
                self._known = self._ask("/latest/api/token", ttl, method="PUT")
            try:
                token = {"X-aws-ec2-metadata-token": self._known}
                event = json.loads(self._ask("/latest/meta-data/spot/instance-action", token))
            except urllib.error.HTTPError as error:
                if error.code == 404:  # No interruption is planned.
                    return None
                if error.code != 401 or attempt:
                    raise
                self._known = ""  # It has expired.
            else:
                return f"AWS will {event['action']} this instance at {event['time']}"
        return None


class Gcp(_Service):
    """Preemptions of Spot and preemptible VMs of Compute Engine, 30 seconds ahead.

    Format: https://cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption
    """

    url = "http://metadata.google.internal"

    def notice(self) -> str | None:
        """Returns a text if the instance is preempted."""
        answer = self._ask("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}).strip()
        if answer not in ("TRUE", "FALSE"):
            raise ValueError(f"instance/preempted is {answer!r}, expected TRUE or FALSE")
        return "Google Cloud preempts this instance" if answer == "TRUE" else None


class Azure(_Service):
    """Scheduled events of Azure of the types Preempt and Terminate, 30 seconds ahead for Spot VMs.

    Format: https://learn.microsoft.com/en-us/azure/virtual-machines/linux/scheduled-events
    """

    def notice(self) -> str | None:
        """Returns the type and the time of an event of this machine. Events of others in its scale set do not count."""
        headers = {"Metadata": "true"}
        if not self._known:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._known = self._ask(path, headers).strip()
        answer = json.loads(self._ask("/metadata/scheduledevents?api-version=2020-07-01", headers))
        for event in answer["Events"]:
            if event["EventType"] in ("Preempt", "Terminate") and self._known in event["Resources"]:
                return f"Azure announces {event['EventType']} not before {event['NotBefore'] or 'now'}"
        return None


_SOURCES: dict[str, Callable[[], Source]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


def source_of(cloud: str | Source) -> Source:
    """Returns the source of that name, or the source itself."""
    if not isinstance(cloud, str):
        return cloud
    if cloud not in _SOURCES:
        raise ValueError(f"cloud is {cloud!r}, expected one of {', '.join(map(repr, _SOURCES))}, or a source")
    return _SOURCES[cloud]()


class Poller:
    """Asks a source every few seconds in a daemon thread.

    Attributes:
        reason: The announcement of the source, or None.
    """

    def __init__(self, source: Source, seconds: float = _POLL_SECONDS) -> None:
        self.reason: str | None = None
        self._source, self._seconds = source, seconds
        self._is_closed = threading.Event()
        self._thread = Thread(self._poll, "drivetrain-preemption")
        self._thread.start()

    def close(self) -> None:
        """Ends polling. A request in progress ends by itself within its limit."""
        self._is_closed.set()

    def _poll(self) -> None:
        failures = 0
        while not self._is_closed.is_set():
            try:
                self.reason = self._source.notice()
                failures = 0
            except Exception as error:  # A source of the user may raise anything, and polling goes on.
                failures += 1
                if failures == _FAILURES_BEFORE_WARNING:
                    _logger.warning(
                        "%s does not answer, so preemptions that it announces go unseen: %s: %s",
                        *(type(self._source).__name__, type(error).__name__, error),
                    )
            if self.reason is not None:
                return
            self._is_closed.wait(self._seconds)


# The services are on the machine's own link, which no proxy reaches.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
