// Egress is a stand-in for the sidecar with which an OpenSandbox server shares a box's network: as much of its HTTP
// interface as the server and the SDK need, and one policy, which denies everything. Like the real one in the mode
// "dns+nft" it then lets nothing out but answers to who called in; in the mode "dns", where the real one refuses
// names and leaves addresses alone, it does nothing.
package main

import (
	"crypto/subtle"
	"encoding/json"
	"log"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
)

type policy struct {
	DefaultAction string           `json:"defaultAction"`
	Egress        []map[string]any `json:"egress"`
}

func main() {
	var wanted policy
	if err := json.Unmarshal([]byte(os.Getenv("OPENSANDBOX_EGRESS_RULES")), &wanted); err != nil {
		log.Fatal("the rules cannot be read: ", err)
	}
	if wanted.DefaultAction != "deny" || len(wanted.Egress) > 0 {
		log.Fatal("this stand-in can only deny everything")
	}
	if wanted.Egress == nil {
		wanted.Egress = []map[string]any{}
	}
	mode := os.Getenv("OPENSANDBOX_EGRESS_MODE")
	if mode == "dns+nft" {
		for _, rule := range []string{
			"-P OUTPUT DROP",
			"-A OUTPUT -o lo -j ACCEPT",
			"-A OUTPUT -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
		} {
			if said, err := exec.Command("/egress/iptables", strings.Fields(rule)...).CombinedOutput(); err != nil {
				log.Fatalf("iptables %s: %v: %s", rule, err, said)
			}
		}
	}
	token := []byte(os.Getenv("OPENSANDBOX_EGRESS_TOKEN"))
	api := http.NewServeMux()
	api.HandleFunc("GET /healthz", func(w http.ResponseWriter, r *http.Request) {})
	api.HandleFunc("GET /policy", func(w http.ResponseWriter, r *http.Request) {
		if subtle.ConstantTimeCompare([]byte(r.Header.Get("OPENSANDBOX-EGRESS-AUTH")), token) != 1 {
			http.Error(w, "no token", http.StatusUnauthorized)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		json.NewEncoder(w).Encode(map[string]any{
			"status": "ok", "mode": "deny_all", "enforcementMode": mode, "policy": wanted,
		})
	})
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		<-ended
		os.Exit(0)
	}()
	log.Fatal(http.ListenAndServe(":18080", api))
}
