// Command kube is every program of a Kubernetes cluster in one file, so that they share their 130 MB:
// `kube PART [flags]` is the program PART. The test cluster in ../../rig builds and runs it.
package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// command returns the root command of a part, or nil for a name that is none.
func command(part string) *cobra.Command {
	switch part {
	case "apiserver":
		return apiserver.NewAPIServerCommand()
	case "controller-manager":
		return controllermanager.NewControllerManagerCommand()
	case "kubectl":
		return kubectl.NewDefaultKubectlCommand()
	case "kubelet":
		return kubelet.NewKubeletCommand(context.Background())
	case "proxy":
		return proxy.NewProxyCommand()
	case "scheduler":
		return scheduler.NewSchedulerCommand()
	}
	return nil
}

func main() {
	var part string
	if len(os.Args) > 1 {
		part = os.Args[1]
		// Each part parses os.Args itself and must not see its own name.
		os.Args = slices.Delete(os.Args, 1, 2)
	}
	if part == "etcd" {
		etcdmain.Main(os.Args)
		return
	}
	root := command(part)
	if root == nil {
		parts := []string{"apiserver", "controller-manager", "etcd", "kubectl", "kubelet", "proxy", "scheduler"}
		fmt.Fprintf(os.Stderr, "kube: no part %q; parts are %s\n", part, strings.Join(parts, ", "))
		os.Exit(2)
	}
	os.Exit(cli.Run(root))
}
