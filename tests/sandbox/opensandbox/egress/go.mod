module egress

go 1.25
