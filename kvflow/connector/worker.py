"""The connector's half inside an engine's worker: vLLM's own, but for how it waits, for events and for the dead, and
for turns that are released before anybody pulled them.
"""

import importlib
import socket
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.platforms import current_platform

from kvflow.connector.patience import patient_progress, same_cores

CONNECT_S = 2.0
"""Seconds that the host of another engine may take to accept a connection."""


class KvflowWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        if current_platform.is_cpu():
            with patient_progress(importlib.import_module("nixl._api").nixlBind), same_cores():
                super().__init__(vllm_config, engine_id, kv_cache_config)
        else:
            super().__init__(vllm_config, engine_id, kv_cache_config)
        self._released: set[str] = set()

    def start_load_kv(self, metadata: Any) -> None:
        super().start_load_kv(metadata)
        self._released |= metadata.released

    def _get_new_notifs(self) -> set[str]:
        """A release counts as the notification that nobody will send: the scheduler is told once of each request.

        vLLM's own means, a deadline that has passed, would log and count each release as KV that expired.
        """
        done: set[str] = super()._get_new_notifs()
        released, self._released = self._released & self._reqs_to_process, set()
        for request_id in released:
            self._reqs_to_process.remove(request_id)
            self._reqs_to_send.pop(request_id, None)
            self.consumer_notification_counts_by_req.pop(request_id, None)
            self.expected_consumer_notifications_by_req.pop(request_id, None)
        done |= released
        return done

    def _nixl_handshake(self, host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        """Raises `OSError` at once for an engine that is gone, where vLLM waits 5 s for its answer.

        Runs in a thread of its own; whatever it raises, the request computes its tokens instead.
        """
        socket.create_connection((host, port), timeout=CONNECT_S).close()
        return super()._nixl_handshake(host, port, *args, **kwargs)
