//! Command lines that cannot be obeyed: exit status 2, and one line that names the cause.

use super::{Folder, fails, load, object, pinpool, refuses, stderr, stdout};

#[test]
fn what_cannot_be_obeyed_is_refused() {
    let files = Folder::new();
    let (file, missing) = (files.make("model.bin", 10_000), files.path().join("missing"));
    let (file, folder) = (file.to_str().unwrap(), files.path());
    let no_checkpoint = "neither an index (*.safetensors.index.json) nor a file that ends in .safetensors";
    let below = "a --capacity of 1 MiB is below one segment: a --chunk of 4 MiB takes 4.0 MiB";
    for (args, cause) in [
        (&["load", missing.to_str().unwrap()][..], "missing: No such file"),
        (&["load", folder.to_str().unwrap()], no_checkpoint),
        (&["load", "/dev/null"], "not a regular file"),
        (&["load", "--sample", "1MiB", file], "--sample"),
        (&["load", file, "--capacity", "1MiB"], below),
        (&["load", file, "--unpinned", "maybe"], "--unpinned"),
        (&["doctor", "--root", ""], "--root"),
        (&["doctor", "--device", "auto:1"], "auto:1"),
        (&["top"], "terminal"),
        (&["top", "--once", "--interval", "0", "h:1"], "--interval"),
        (&["top", "--once", "https://host"], "only http is supported"),
    ] {
        // The host device is there on every machine.
        let device = args[0] == "load" || args[0] == "bench";
        refuses(pinpool().args(args).args(device.then_some("--device=host")), cause);
    }
    // With `--json` the line on stderr is in an object, too.
    for command in ["load", "bench", "doctor"] {
        for device in ["gpu", "cuda:x", ""] {
            let args = [command, "--json", "--device", device];
            let output = pinpool().args(args).output().unwrap();
            assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stderr(&output));
            let error = object(&output)["error"].as_str().expect("a text").to_owned();
            assert!(error.contains("is not available"), "{error}");
            assert_eq!(stderr(&output), format!("error: {error}\n"), "{args:?}");
        }
    }
    // A device that is missing is no fault of the command line.
    for (device, cause) in [("host:99", "host:99"), ("cuda:99", "cuda:99"), ("acl:99", "acl")] {
        let output = fails(pinpool().args(["load", file, "--device", device]), cause);
        assert_eq!((stdout(&output), stderr(&output).lines().count()), (String::new(), 1));
        let told = object(&fails(pinpool().args(["bench", "--json", "--device", device]), cause));
        assert!(told.as_object().unwrap().len() > 5 && told["error"].is_string(), "its usual keys: {told}");
    }
    // Without any command the whole help is printed, and it is an error all the same.
    assert_eq!(pinpool().output().unwrap().status.code(), Some(2));
    let help = stdout(&pinpool().arg("--help").output().unwrap());
    assert!(help.contains("load") && help.contains("Exit status"), "{help}");
    let version = stdout(&pinpool().arg("--version").output().unwrap());
    assert_eq!(version.trim(), concat!("pinpool ", env!("CARGO_PKG_VERSION")));
}

#[test]
fn sizes_are_read_and_told() {
    // Of a pool that is made, told by the doctor.
    for (text, bytes, told) in [
        ("1023", 1023_u64, "1023 bytes"),
        (" 3kb ", 3000, "3000 bytes"),
        ("3.5GiB", 7 << 29, "3.5 GiB"),
        ("0.1 mib", 104_857, "102.4 KiB"),
    ] {
        let doctor = |json: Option<&str>| {
            let args = ["doctor", "--device", "host", "--pin", "1MiB", "--capacity", text];
            pinpool().args(args).args(json).output().unwrap()
        };
        assert_eq!(object(&doctor(Some("--json")))["capacity_bytes"], bytes, "{text:?}");
        let said = stdout(&doctor(None));
        assert!(said.starts_with(&format!("device host:0, a pool of {told}")), "{said}");
    }
    let bad =
        ",x,MiB,-1,1.5,1.GiB,.5GiB,1.5.5GiB,64M,64MiBs,12 34,0,0MiB,99999999TiB,99999999999999999999,1é";
    for (size, option) in bad.split(',').zip(["--capacity", "--chunk", "--sample"].into_iter().cycle()) {
        refuses(load(["file"]).arg(format!("{option}={size}")), option);
    }
}
