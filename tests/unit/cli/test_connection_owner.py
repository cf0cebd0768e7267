import os
import socket

from specdec.cli.connection_owner import owner_of_port


def test_the_process_whose_connection_it_is_is_found_by_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as client:
            port = client.getsockname()[1]
            assert owner_of_port(port, {"init": 1, "us": os.getpid()}) == "us"
            assert owner_of_port(port, {"nobody": 2**22 + 1}) is None
        assert owner_of_port(1, {"us": os.getpid()}) is None
