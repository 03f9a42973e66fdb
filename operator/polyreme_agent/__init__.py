"""The node agent: a privileged reader of faults without a token, and a restricted reporter that writes conditions."""
