"""`LLMDataDist` as programs of the first generation know it: `init` writes into the caller's dictionary."""

from __future__ import annotations

import json
import os

from llm_datadist import datadist
from llm_datadist._addresses import little_endian
from llm_datadist.datadist import _shutdown_handler

__all__ = ["LLMDataDist", "_shutdown_handler"]


class _OneInstance(type):
    """Lets a program that sets ``llm_engine_instance`` set the one that there is, not one of the subclass."""

    def __setattr__(cls, name: str, value: object) -> None:
        if name == "llm_engine_instance":
            setattr(datadist.LLMDataDist, name, value)
        else:
            super().__setattr__(name, value)


class LLMDataDist(datadist.LLMDataDist, metaclass=_OneInstance):
    __doc__ = datadist.LLMDataDist.__doc__

    def init(self, options: dict[str, str]) -> None:
        """Start the engine, and complete the options.

        Parameters
        ----------
        options : dict of str to str
            As for `llm_datadist.LLMDataDist.init`, but not copied: after success it also has ``llm.Role``;
            ``llm.ClusterInfo``, if it was not there, with cluster id and listen addresses as JSON; and
            ``ge.resourceConfigPath`` from the environment variable ``RESOURCE_CONFIG_PATH``, if that is set.

        Raises
        ------
        TypeError, ValueError, LLMException
            As `llm_datadist.LLMDataDist.init`; the dictionary is as it was then.

        Notes
        -----
        ``llm.ClusterInfo`` wins over ``llm.listenIpInfo``: remove it before another `init` with another address.
        """
        was_initialized = self._is_initialized
        super().init(options)
        if was_initialized:
            return
        listen = self._running().config.listen
        cluster_info = {
            "cluster_id": self.cluster_id,
            "listen_ip_info": [{"ip": little_endian(address.host), "port": address.port} for address in listen],
        }
        options["llm.Role"] = self._role_to_str(self._role)
        options.setdefault("llm.ClusterInfo", json.dumps(cluster_info))
        if "RESOURCE_CONFIG_PATH" in os.environ:
            options.setdefault("ge.resourceConfigPath", os.environ["RESOURCE_CONFIG_PATH"])
