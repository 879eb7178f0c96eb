//! Which files make up a checkpoint.

use pinpool::Error;
use pinpool_safetensors::Checkpoint;

use super::{Folder, Rig, arrived, file, made};

fn refused(path: &std::path::Path, tensor: Option<&str>, cause: &str) {
    match Checkpoint::open(path) {
        Err(Error::Malformed { tensor: named, why, .. }) => {
            assert!(named.as_deref() == tensor && why.contains(cause), "{named:?}: {why}");
        }
        other => panic!("{cause}: {other:?}"),
    }
}

fn names(checkpoint: &Checkpoint) -> Vec<String> {
    checkpoint.tensors().map(|tensor| tensor.name().to_owned()).collect()
}

#[test]
fn an_index_says_which_tensors_are_in_which_file() {
    let (rig, folder) = (Rig::late(), Folder::new());
    // They could lie side by side on the device, but for the one in their midst.
    let first = [made("a", "F32", &[32], 1), made("old", "F32", &[4], 2), made("b", "U8", &[16], 3)];
    let second = [made("c", "BF16", &[70, 1000], 4)];
    folder.put("model-1.safetensors", file(&first));
    // As in a hub's cache: the files beside the index are links to elsewhere.
    let store = Folder::new();
    std::os::unix::fs::symlink(store.put("blob", file(&second)), folder.path().join("model-2.safetensors"))
        .unwrap();
    // Beside them, and not named.
    folder.put("other.safetensors", "not a checkpoint at all");
    let map = r#"{"metadata":{"total_size":1},"weight_map":{"c":"model-2.safetensors","a":"model-1.safetensors","b":"model-1.safetensors"}}"#;
    let index = folder.put("model.safetensors.index.json", map);
    let copier = rig.copier();
    for path in [&*index, folder.path()] {
        let checkpoint = Checkpoint::open(path).unwrap();
        assert_eq!(names(&checkpoint), ["a", "b", "c"]);
        let got = checkpoint.loader(&copier).load().unwrap();
        arrived(&copier, &got, [&first[0], &first[2], &second[0]]);
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
    let outside =
        ["../1.safetensors", "/etc/passwd", "sub/1.safetensors", "./1.safetensors", "1/.", "", ".", ".."];
    for outside in outside {
        refused(&with(&format!(r#"{{"weight_map":{{"a":"{outside}"}}}}"#)), Some("a"), "no name of a file");
    }
    refused(&with(r#"{"weight_map":{"a":7}}"#), Some("a"), "no name of a file");
    refused(&with(r#"{"weight_map":{}}"#), None, "names no tensor");
    refused(&with(r#"{"weight_map":[]}"#), None, "weight_map");
    refused(&with("{"), None, "no JSON object");
    refused(&with("[]"), None, "weight_map");
    for again in ["{}", r#"{"a":"1.safetensors"}"#, "[]"] {
        let twice = format!(r#"{{"weight_map":{{"a":"1.safetensors"}},"weight_map":{again}}}"#);
        refused(&with(&twice), None, "there twice");
    }
    // A name that no file has: it would be in the error, whole.
    let long = with(&format!(r#"{{"weight_map":{{"a":"{}"}}}}"#, "x".repeat(100_000)));
    refused(&long, Some("a"), "no name of a file");
    // In two files, says the index: it cannot be told in which.
    folder.put("2.safetensors", file(&[made("a", "U8", &[3], 2)]));
    refused(&with(r#"{"weight_map":{"a":"1.safetensors","a":"2.safetensors"}}"#), Some("a"), "twice");
    refused(&with(r#"{"weight_map":{"a":"1.safetensors","a":"1.safetensors"}}"#), Some("a"), "named twice");
    // With another between them that has it, and is not said to.
    folder.put("2.safetensors", file(&[made("a", "U8", &[3], 2), made("b", "U8", &[3], 2)]));
    folder.put("3.safetensors", file(&[made("a", "U8", &[3], 3)]));
    let twice = r#"{"weight_map":{"a":"1.safetensors","b":"2.safetensors","\u0061":"3.safetensors"}}"#;
    refused(&with(twice), Some("a"), "named twice");
    // Half of a pair.
    refused(&with(r#"{"weight_map":{"\ud800":"1.safetensors"}}"#), Some(r#""\ud800""#), "does not have it");
    refused(&with(r#"{"weight_map":{"a":"\ud800"}}"#), Some("a"), "no name of a file");
    std::fs::remove_file(folder.path().join("2.safetensors")).unwrap();
    let missing = Checkpoint::open(with(r#"{"weight_map":{"a":"2.safetensors"}}"#)).map(drop).unwrap_err();
    assert!(matches!(&missing, Error::Read { what, .. } if what.ends_with("2.safetensors")), "{missing}");
}

/// As diffusers and transformers name them, with and without a variant.
#[test]
fn an_index_counts_under_any_name() {
    for name in [
        "model.safetensors.index.json",
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
            assert_eq!(names(&Checkpoint::open(path).unwrap()), ["a"], "{path:?}");
        }
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
    refused(folder.path(), None, "give the path of the one to load");
    let one = Checkpoint::open(folder.path().join(names[1])).unwrap();
    assert!(one.tensors().all(|tensor| tensor.file().ends_with("2.safetensors")));
}

/// A download that has stopped half-way: files are missing, are links to what is not there yet, or another text stands
/// in their place.
#[test]
fn what_a_download_leaves_is_told() {
    let folder = Folder::new();
    let map = r#"{"weight_map":{"t1":"1.safetensors","t2":"2.safetensors"}}"#;
    let index = folder.put("model.safetensors.index.json", map);
    folder.put("1.safetensors", file(&[made("t1", "U8", &[3], 1)]));
    let told = || {
        for opened in [Checkpoint::open(&index), Checkpoint::open(folder.path())] {
            let error = opened.map(drop).unwrap_err();
            let is_it = matches!(&error, Error::Read { what, kind: std::io::ErrorKind::NotFound, .. }
                if what.ends_with("2.safetensors"));
            assert!(is_it && error.to_string().contains("download is incomplete"), "{error}");
        }
    };
    told();
    std::os::unix::fs::symlink("../blobs/gone.incomplete", folder.path().join("2.safetensors")).unwrap();
    told();
    let pointer =
        format!("version https://git-lfs.github.com/spec/v1\noid sha256:{:064}\nsize 4976698672\n", 0);
    for name in ["model.safetensors", "model.safetensors.index.json"] {
        for (text, told) in [
            (&*pointer, "version https://git-lfs"),
            ("\n  <html lang=\"en\"><head><title>Not found", "\"<html lang"),
            ("Entry not found", "\"Entry not found\""),
        ] {
            refused(&folder.put(name, text), None, told);
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
    assert_eq!(names(&checkpoint), ["z", "b"]);
    // A tensor that two files have is refused.
    folder.put("c.safetensors", file(&[made("b", "U8", &[3], 1)]));
    refused(folder.path(), Some("b"), "b.safetensors too: it is there twice");

    assert!(matches!(
        Checkpoint::open_files::<&str>(&[]),
        Err(Error::Argument(text)) if text.contains("no file was named")
    ));
    assert!(matches!(Checkpoint::open(folder.path().join("nowhere")), Err(Error::Read { .. })));
    refused(std::path::Path::new("/dev/null"), None, "no regular file");
}

/// As in a hub's cache that was tidied up. Which tensors were meant, only the index could tell.
#[test]
fn an_index_that_cannot_be_read_is_not_done_without() {
    let folder = Folder::new();
    folder.put("1.safetensors", file(&[made("a", "U8", &[3], 1)]));
    let index = folder.path().join("model.safetensors.index.json");
    let open = |path: &std::path::Path| {
        // No process ever writes into the pipe.
        let (told, result) = std::sync::mpsc::channel();
        let path = path.to_owned();
        std::thread::spawn(move || _ = told.send(Checkpoint::open(path).map(drop)));
        result.recv_timeout(std::time::Duration::from_secs(20)).expect("it waits for a writer")
    };
    let is_told = || match open(folder.path()) {
        Err(Error::Read { what, .. } | Error::Malformed { what, .. })
            if what == index.display().to_string() => {}
        other => panic!("{other:?}"),
    };
    std::os::unix::fs::symlink(folder.path().join("gone"), &index).unwrap();
    is_told();
    std::fs::remove_file(&index).unwrap();
    std::fs::create_dir(&index).unwrap();
    is_told();
    std::fs::remove_dir(&index).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&index).status().unwrap().success());
    is_told();
    std::fs::remove_file(&index).unwrap();
    assert_eq!(open(folder.path()), Ok(()));
    let pipe = folder.path().join("pipe.safetensors");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    assert!(matches!(open(&pipe), Err(Error::Malformed { .. })));
}

#[test]
fn a_folder_whose_files_say_how_many_they_are_has_to_have_all_of_them() {
    let folder = Folder::new();
    let put = |name: &str| folder.put(name, file(&[made(name, "U8", &[3], 1)]));
    put("model-00001-of-00003.safetensors");
    let last = put("model-00003-of-00003.safetensors");
    refused(folder.path(), None, "2 files model-*-of-00003.safetensors are in it");
    put("model-00002-of-00003.safetensors");
    assert_eq!(Checkpoint::open(folder.path()).unwrap().tensors().count(), 3);
    // Other series of files count on their own.
    for other in ["head-of-state", "extra-0-of-2", "extra-1-of-2", "extra-3-of-99999999999999999999"] {
        put(&format!("{other}.safetensors"));
    }
    assert_eq!(Checkpoint::open(folder.path()).unwrap().tensors().count(), 7);
    std::fs::remove_file(last).unwrap();
    refused(folder.path(), None, "2 files model-*-of-00003.safetensors are in it");
}
