"""acl: engines on Ascend devices, whose memory HCCL moves one-sided between machines."""
