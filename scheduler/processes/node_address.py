"""The address of this machine, in a process of Ray."""


def node_address() -> str:
    """The address by which the cluster's machines know this one."""
    import ray

    return str(ray.util.get_node_ip_address())
