//! Which files make up a checkpoint.

use pinpool::Error;
use pinpool_safetensors::Checkpoint;

use super::{Folder, Made, Rig, arrived, file, made};

fn refused(path: &std::path::Path, tensor: Option<&str>, cause: &str) {
    match Checkpoint::open(path) {
        Err(Error::Malformed { tensor: named, why, .. }) => {
            assert!(named.as_deref() == tensor && why.contains(cause), "{named:?}: {why}");
        }
        other => panic!("{cause}: {other:?}"),
    }
}

#[test]
fn an_index_says_which_tensors_are_in_which_file() {
    let (rig, folder) = (Rig::late(), Folder::new());
    // They could lie side by side on the device, but for the one in their midst.
    let first = [made("a", "F32", &[32], 1), made("old", "F32", &[4], 2), made("b", "U8", &[16], 3)];
    let second = [made("c", "BF16", &[70, 1000], 4)];
    folder.put("model-1.safetensors", file(&first));
    folder.put("model-2.safetensors", file(&second));
    // Beside them, and not named.
    folder.put("other.safetensors", "not a checkpoint at all");
    let map = r#"{"metadata":{"total_size":1},"weight_map":{"c":"model-2.safetensors","a":"model-1.safetensors","b":"model-1.safetensors"}}"#;
    let index = folder.put("model.safetensors.index.json", map);
    let copier = rig.copier();
    for path in [&*index, folder.path()] {
        let checkpoint = Checkpoint::open(path).unwrap();
        let expected: Vec<&Made> = vec![&first[0], &first[2], &second[0]];
        assert_eq!(checkpoint.tensors().map(|t| t.name().to_owned()).collect::<Vec<_>>(), ["a", "b", "c"]);
        let got = checkpoint.loader(&copier).load().unwrap();
        arrived(&copier, &got, expected);
    }
    rig.all_is_back();
}

#[test]
fn an_index_that_lies_is_refused() {
    let folder = Folder::new();
    folder.put("1.safetensors", file(&[made("a", "U8", &[3], 1)]));
    let with = |text: &str| folder.put("model.safetensors.index.json", text);
    refused(
        &with(r#"{"weight_map":{"a":"1.safetensors","b":"1.safetensors"}}"#),
        Some("b"),
        "does not have it",
    );
    for outside in ["../1.safetensors", "/etc/passwd", "sub/1.safetensors", "", ".", ".."] {
        refused(&with(&format!(r#"{{"weight_map":{{"a":"{outside}"}}}}"#)), Some("a"), "no name of a file");
    }
    refused(&with(r#"{"weight_map":{"a":7}}"#), Some("a"), "no name of a file");
    refused(&with(r#"{"weight_map":{}}"#), None, "names no tensor");
    refused(&with(r#"{"weight_map":[]}"#), None, "weight_map");
    refused(&with("{"), None, "no JSON");
    refused(&with("[]"), None, "weight_map");
    for again in ["{}", r#"{"a":"1.safetensors"}"#, "[]"] {
        let twice = format!(r#"{{"weight_map":{{"a":"1.safetensors"}},"weight_map":{again}}}"#);
        refused(&with(&twice), None, "\"weight_map\" is there twice");
    }
    // A name that no file has: it would be in the error, whole.
    let long = format!(r#"{{"weight_map":{{"a":"{}"}}}}"#, "x".repeat(100_000));
    let error = Checkpoint::open(with(&long)).map(drop).unwrap_err();
    assert!(matches!(&error, Error::Malformed { tensor: Some(_), .. }), "no name of a file");
    assert!(error.to_string().len() < 2000, "{} bytes", error.to_string().len());
    // In two files, says the index: it cannot be told in which.
    folder.put("2.safetensors", file(&[made("a", "U8", &[3], 2)]));
    let both = r#"{"weight_map":{"a":"1.safetensors","a":"2.safetensors"}}"#;
    refused(&with(both), Some("a"), "twice");
    std::fs::remove_file(folder.path().join("2.safetensors")).unwrap();
    let missing = Checkpoint::open(with(r#"{"weight_map":{"a":"2.safetensors"}}"#)).map(drop).unwrap_err();
    assert!(matches!(&missing, Error::Read { what, .. } if what.ends_with("2.safetensors")), "{missing}");
}

/// As diffusers and transformers name them, with and without a variant.
#[test]
fn an_index_counts_under_any_name() {
    for name in [
        "model.safetensors.index.json",
        "diffusion_pytorch_model.safetensors.index.json",
        "model.safetensors.index.fp16.json",
        "diffusion_pytorch_model.safetensors.fp16.index.json",
        "model.fp16.safetensors.index.json",
    ] {
        let folder = Folder::new();
        folder.put("1.safetensors", file(&[made("a", "U8", &[3], 1), made("stale", "U8", &[3], 2)]));
        // Another split of the same tensors, and JSON that is no index.
        folder.put("other.safetensors", file(&[made("a", "U8", &[3], 3)]));
        folder.put("config.json", "{}");
        folder.put("model.safetensors.json", "{}");
        // macOS leaves one beside each file that it copies.
        folder.put("._model.safetensors.index.json", "\0\u{5}\u{16}\u{7}");
        let index = folder.put(name, r#"{"weight_map":{"a":"1.safetensors"}}"#);
        for path in [&*index, folder.path()] {
            let checkpoint = Checkpoint::open(path).unwrap();
            assert_eq!(
                checkpoint.tensors().map(|t| t.name().to_owned()).collect::<Vec<_>>(),
                ["a"],
                "{path:?}"
            );
        }
        // One that leads nowhere is not done without.
        std::fs::remove_file(&index).unwrap();
        std::os::unix::fs::symlink(folder.path().join("gone"), &index).unwrap();
        let gone = Checkpoint::open(folder.path()).map(drop).unwrap_err();
        assert!(matches!(&gone, Error::Read { what, .. } if what.ends_with(name)), "{gone}");
    }
}

#[test]
fn of_several_indexes_none_is_chosen() {
    let folder = Folder::new();
    let names = ["model.safetensors.index.fp16.json", "model.safetensors.index.json"];
    for (name, shard) in names.into_iter().zip(["1.safetensors", "2.safetensors"]) {
        folder.put(shard, file(&[made("a", "U8", &[3], 1)]));
        folder.put(name, format!(r#"{{"weight_map":{{"a":"{shard}"}}}}"#));
    }
    refused(folder.path(), None, &names.join(", "));
    refused(folder.path(), None, "give the path of the one to load");
    for (name, shard) in names.into_iter().zip(["1.safetensors", "2.safetensors"]) {
        let checkpoint = Checkpoint::open(folder.path().join(name)).unwrap();
        assert!(checkpoint.tensors().all(|tensor| tensor.file().ends_with(shard)));
    }
}

/// As some editors save it.
#[test]
fn an_index_may_begin_with_a_byte_order_mark() {
    let folder = Folder::new();
    folder.put("1.safetensors", file(&[made("a", "U8", &[3], 1)]));
    folder.put("model.safetensors.index.json", "\u{feff}{\"weight_map\":{\"a\":\"1.safetensors\"}}");
    assert_eq!(Checkpoint::open(folder.path()).unwrap().tensors().count(), 1);
}

#[test]
fn a_file_in_this_folder_is_beside_the_index() {
    let folder = Folder::new();
    folder.put("1.safetensors", file(&[made("a", "U8", &[3], 1), made("b", "U8", &[3], 1)]));
    folder.put("2.safetensors", file(&[made("c", "U8", &[3], 2)]));
    let map = r#"{"weight_map":{"a":"./1.safetensors","b":"1.safetensors","c":"./2.safetensors"}}"#;
    let index = folder.put("model.safetensors.index.json", map);
    let mut names: Vec<String> =
        Checkpoint::open(&index).unwrap().tensors().map(|t| t.name().to_owned()).collect();
    names.sort();
    assert_eq!(names, ["a", "b", "c"]);
    for outside in ["./../1.safetensors", "./", "./.", "./sub/1.safetensors", ".//etc/passwd"] {
        folder.put("model.safetensors.index.json", format!(r#"{{"weight_map":{{"a":"{outside}"}}}}"#));
        refused(&index, Some("a"), "no name of a file");
    }
}

/// A download that has stopped half-way: files are missing, or are links to what is not there yet.
#[test]
fn what_is_missing_is_counted() {
    let folder = Folder::new();
    let shard = |number: usize| format!("model-{number:05}-of-00004.safetensors");
    let path = |number: usize| folder.path().join(shard(number));
    let map: Vec<String> = (1..=4).map(|number| format!(r#""t{number}":"{}""#, shard(number))).collect();
    let index =
        folder.put("model.safetensors.index.json", format!(r#"{{"weight_map":{{{}}}}}"#, map.join(",")));
    folder.put(&shard(1), file(&[made("t1", "U8", &[3], 1)]));
    folder.put(&shard(4), file(&[made("t4", "U8", &[3], 1)]));
    std::os::unix::fs::symlink("../blobs/gone.incomplete", path(3)).unwrap();
    let told = |number: usize, causes: &[&str]| {
        for opened in [Checkpoint::open(&index), Checkpoint::open(folder.path())] {
            let error = opened.map(drop).unwrap_err();
            let is_it = matches!(&error, Error::Read { what, kind: std::io::ErrorKind::NotFound, .. }
                if what.ends_with(&shard(number)));
            assert!(is_it && causes.iter().all(|cause| error.to_string().contains(cause)), "{error}");
        }
    };
    told(2, &["2 of the 4 files", "download is incomplete"]);
    folder.put(&shard(2), file(&[made("t2", "U8", &[3], 1)]));
    told(3, &["1 of the 4 files", "a link to ../blobs/gone.incomplete", "download is incomplete"]);
    // The link by itself, and in a folder without an index.
    std::fs::remove_file(&index).unwrap();
    for path in [&*path(3), folder.path()] {
        let error = Checkpoint::open(path).map(drop).unwrap_err();
        assert!(
            error.to_string().contains("a link to ../blobs/gone.incomplete, which is missing"),
            "{error}"
        );
    }
    for number in [2, 3] {
        std::fs::remove_file(path(number)).unwrap();
    }
    refused(folder.path(), None, "2 of the 4 files");
    refused(folder.path(), None, "model-00002-of-00004.safetensors is missing");
}

/// What downloads leave in the place of a file: its pointer in Git LFS, an error page, an error text.
#[test]
fn what_stands_in_for_a_file_is_told() {
    let folder = Folder::new();
    let pointer =
        format!("version https://git-lfs.github.com/spec/v1\noid sha256:{:064}\nsize 4976698672\n", 0);
    for name in ["model.safetensors", "model.safetensors.index.json"] {
        for (text, told) in [
            (&*pointer, "git lfs pull"),
            ("<!DOCTYPE html><html><head><title>Not found</title></head></html>", "\"<!DOCTYPE html>"),
            ("\n  <html lang=\"en\">", "<html"),
            ("<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code></Error>", "<?xml"),
            ("Entry not found", "\"Entry not found\""),
        ] {
            let path = folder.put(name, text);
            refused(&path, None, told);
            let error = Checkpoint::open(&path).map(drop).unwrap_err().to_string();
            assert!(!error.contains("header would have") && error.contains("in the place of"), "{error}");
        }
    }
}

#[test]
fn a_folder_without_an_index_is_all_of_its_files() {
    let folder = Folder::new();
    refused(folder.path(), None, "neither");
    folder.put("b.safetensors", file(&[made("b", "U8", &[3], 1)]));
    folder.put("a.safetensors", file(&[made("z", "U8", &[3], 1)]));
    folder.put("config.json", "{}");
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(checkpoint.tensors().map(|t| t.name().to_owned()).collect::<Vec<_>>(), ["z", "b"]);
    // A tensor that two files have is refused.
    folder.put("c.safetensors", file(&[made("b", "U8", &[3], 1)]));
    refused(folder.path(), Some("b"), "b.safetensors too");

    assert!(matches!(
        Checkpoint::open_files::<&str>(&[]),
        Err(Error::Argument(text)) if text.contains("no file was named")
    ));
    assert!(matches!(Checkpoint::open(folder.path().join("nowhere")), Err(Error::Read { .. })));
    refused(std::path::Path::new("/dev/null"), None, "no regular file");
}

#[test]
fn what_is_no_file_is_not_waited_for() {
    let folder = Folder::new();
    folder.put("1.safetensors", file(&[made("a", "U8", &[3], 1)]));
    for name in ["pipe.safetensors", "pipe.safetensors.index.json"] {
        let path = folder.path().join(name);
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        // No process ever writes into it.
        let (told, result) = std::sync::mpsc::channel();
        let opened = path.clone();
        std::thread::spawn(move || _ = told.send(Checkpoint::open(opened).map(drop)));
        let result = result.recv_timeout(std::time::Duration::from_secs(20)).expect("it waits for a writer");
        assert!(
            matches!(&result, Err(Error::Malformed { why, .. }) if why.contains("no regular file")),
            "{result:?}"
        );
    }
}

/// As in a hub's cache: the files beside the index are links to elsewhere.
#[test]
fn links_are_followed_and_must_lead_somewhere() {
    let (folder, store) = (Folder::new(), Folder::new());
    let there = store.put("blob", file(&[made("a", "U8", &[3], 1)]));
    let link = folder.path().join("1.safetensors");
    std::os::unix::fs::symlink(&there, &link).unwrap();
    let index = folder.put("model.safetensors.index.json", r#"{"weight_map":{"a":"1.safetensors"}}"#);
    assert_eq!(Checkpoint::open(&index).unwrap().tensors().count(), 1);
    std::fs::remove_file(&index).unwrap();
    assert_eq!(Checkpoint::open(folder.path()).unwrap().tensors().count(), 1);

    // A link that leads nowhere is an error for a missing file, not a checkpoint without it.
    std::os::unix::fs::symlink(store.path().join("gone"), folder.path().join("2.safetensors")).unwrap();
    let missing = Checkpoint::open(folder.path()).map(drop).unwrap_err();
    assert!(matches!(&missing, Error::Read { what, .. } if what.ends_with("2.safetensors")), "{missing}");
}

/// As in a hub's cache that was tidied up. Which tensors were meant, only the index could tell.
#[test]
fn an_index_that_cannot_be_read_is_not_done_without() {
    let folder = Folder::new();
    folder.put("1.safetensors", file(&[made("a", "U8", &[3], 1)]));
    let index = folder.path().join("model.safetensors.index.json");
    let open = || {
        // No process ever writes into the pipe.
        let (told, result) = std::sync::mpsc::channel();
        let path = folder.path().to_owned();
        std::thread::spawn(move || _ = told.send(Checkpoint::open(path).map(drop)));
        result.recv_timeout(std::time::Duration::from_secs(20)).expect("it waits for a writer")
    };
    let is_index = |what: &String| what.ends_with("model.safetensors.index.json");

    std::os::unix::fs::symlink(folder.path().join("gone"), &index).unwrap();
    let gone = open();
    assert!(matches!(&gone, Err(Error::Read { what, .. }) if is_index(what)), "{gone:?}");
    std::fs::remove_file(&index).unwrap();

    std::fs::create_dir(&index).unwrap();
    let directory = open();
    assert!(matches!(&directory, Err(Error::Malformed { what, .. }) if is_index(what)), "{directory:?}");
    std::fs::remove_dir(&index).unwrap();

    assert!(std::process::Command::new("mkfifo").arg(&index).status().unwrap().success());
    let pipe = open();
    assert!(matches!(&pipe, Err(Error::Malformed { what, .. }) if is_index(what)), "{pipe:?}");
    std::fs::remove_file(&index).unwrap();
    assert_eq!(open(), Ok(()));
}

#[test]
fn a_folder_whose_files_say_how_many_they_are_has_to_have_all_of_them() {
    let folder = Folder::new();
    let put = |name: &str| folder.put(name, file(&[made(name, "U8", &[3], 1)]));
    put("model-00001-of-00003.safetensors");
    let last = put("model-00003-of-00003.safetensors");
    refused(folder.path(), None, "model-00002-of-00003.safetensors is missing");
    put("model-00002-of-00003.safetensors");
    assert_eq!(Checkpoint::open(folder.path()).unwrap().tensors().count(), 3);
    // Other series of files count on their own, and some from 0.
    put("head-of-state.safetensors");
    put("extra-0-of-2.safetensors");
    put("extra-1-of-2.safetensors");
    assert_eq!(Checkpoint::open(folder.path()).unwrap().tensors().count(), 6);
    std::fs::remove_file(last).unwrap();
    refused(folder.path(), None, "model-00003-of-00003.safetensors is missing");
    put("extra-3-of-99999999999999999999.safetensors");
    refused(folder.path(), None, "model-00003-of-00003.safetensors is missing");
}

#[test]
fn a_tensor_that_an_index_leaves_out_is_not_loaded_whatever_the_alignment() {
    let (rig, folder) = (Rig::late(), Folder::new());
    let tensors = [made("a", "F32", &[32], 1), made("old", "F32", &[100_000], 2), made("b", "U8", &[16], 3)];
    folder.put("model-1.safetensors", file(&tensors));
    let map = r#"{"weight_map":{"a":"model-1.safetensors","b":"model-1.safetensors"}}"#;
    let index = folder.put("model.safetensors.index.json", map);
    let copier = rig.copier();
    for align in [16, 2, 1] {
        let (checkpoint, mut asked) = (Checkpoint::open(&index).unwrap(), Vec::new());
        let loader = checkpoint.loader(&copier).align(align).memory(|n| {
            asked.push(n);
            copier.device().alloc(n)?.slice(..)
        });
        let loaded = loader.load().unwrap();
        arrived(&copier, &loaded, [&tensors[0], &tensors[2]]);
        drop(loaded);
        assert_eq!(asked, [128 + 16], "align {align}");
    }
}
