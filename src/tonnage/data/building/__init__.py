"""Part -> Documents: the whole way of a row, in this process, in several, or on a cluster."""
