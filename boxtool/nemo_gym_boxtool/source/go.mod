module boxtool

go 1.25
