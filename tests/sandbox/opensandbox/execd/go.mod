module execd

go 1.25
