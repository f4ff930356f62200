"""The training stages: what each trains, on what data, with which loss."""
