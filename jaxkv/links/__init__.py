"""Messages between the processes of one program: values as bytes, and the sockets that carry them."""
