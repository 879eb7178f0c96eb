//! Which files make up a checkpoint.

use pinpool::Error;
use pinpool_safetensors::Checkpoint;

use super::{Folder, Rig, arrived, file, is_argument, made};

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
}

#[test]
fn an_index_that_lies_is_refused() {
    let folder = Folder::new();
    folder.put("1.safetensors", file(&[made("a", "U8", &[3], 1)]));
    let with = |text: &str| folder.put("model.safetensors.index.json", text);
    for outside in ["../1.safetensors", "/etc/passwd", "sub/1.safetensors", "", ".."] {
        refused(&with(&format!(r#"{{"weight_map":{{"a":"{outside}"}}}}"#)), Some("a"), "no name of a file");
    }
    for (text, tensor, why) in [
        (r#"{"weight_map":{"a":"1.safetensors","b":"1.safetensors"}}"#, Some("b"), "does not have it"),
        // Half of a pair.
        (r#"{"weight_map":{"\ud800":"1.safetensors"}}"#, Some(r#""\ud800""#), "does not have it"),
        (r#"{"weight_map":{}}"#, None, "names no tensor"),
        ("{", None, "no JSON object"),
        (r#"{"weight_map":{"a":"1.safetensors"},"weight_map":{}}"#, None, "there twice"),
    ] {
        refused(&with(text), tensor, why);
    }
    // In two files, says the index, with another between them that has it and is not said to.
    folder.put("2.safetensors", file(&[made("a", "U8", &[3], 2), made("b", "U8", &[3], 2)]));
    folder.put("3.safetensors", file(&[made("a", "U8", &[3], 3)]));
    let twice = r#"{"weight_map":{"a":"1.safetensors","b":"2.safetensors","\u0061":"3.safetensors"}}"#;
    refused(&with(twice), Some("a"), "named twice");
}

/// As diffusers and transformers name them, with and without a variant.
#[test]
fn an_index_counts_under_any_name_and_of_several_none_is_chosen() {
    let mut folder = Folder::new();
    let map = r#"{"weight_map":{"a":"1.safetensors"}}"#;
    for name in [
        "model.safetensors.index.json",
        "model.safetensors.index.fp16.json",
        "diffusion_pytorch_model.safetensors.fp16.index.json",
        "model.fp16.safetensors.index.json",
    ] {
        folder = Folder::new();
        folder.put("1.safetensors", file(&[made("a", "U8", &[3], 1), made("stale", "U8", &[3], 2)]));
        // Another split of the same tensors, and JSON that is no index.
        folder.put("other.safetensors", file(&[made("a", "U8", &[3], 3)]));
        folder.put("config.json", "{}");
        folder.put("model.safetensors.json", "{}");
        // macOS leaves one beside each file that it copies.
        folder.put("._model.safetensors.index.json", "\0\u{5}\u{16}\u{7}");
        let index = folder.put(name, map);
        for path in [&*index, folder.path()] {
            assert_eq!(names(&Checkpoint::open(path).unwrap()), ["a"], "{path:?}");
        }
    }
    let second = folder.put("second.safetensors.index.json", map.replace('1', "other"));
    refused(folder.path(), None, "give the path of the one to load");
    let one = Checkpoint::open(second).unwrap();
    assert!(one.tensors().all(|tensor| tensor.file().ends_with("other.safetensors")));
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
fn a_folder_without_an_index_is_all_of_its_files_which_have_to_be_all_there() {
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

    is_argument(&Checkpoint::open_files::<&str>(&[]).map(drop).unwrap_err(), "no file was named");
    assert!(matches!(Checkpoint::open(folder.path().join("nowhere")), Err(Error::Read { .. })));
    refused(std::path::Path::new("/dev/null"), None, "no regular file");

    // Files that say how many they are have to be all there.
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

/// As in a hub's cache that was tidied up. Which tensors were meant, only the index could tell.
#[test]
fn an_index_that_cannot_be_read_is_not_done_without() {
    let folder = Folder::new();
    folder.put("1.safetensors", file(&[made("a", "U8", &[3], 1)]));
    let index = folder.path().join("model.safetensors.index.json");
    let pipe = |path: &std::path::Path| {
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    };
    let open = |path: &std::path::Path| {
        // No process ever writes into the pipe.
        let (told, result) = std::sync::mpsc::channel();
        let path = path.to_owned();
        std::thread::spawn(move || _ = told.send(Checkpoint::open(path).map(drop)));
        result.recv_timeout(std::time::Duration::from_secs(20)).expect("it waits for a writer")
    };
    let makes: [&dyn Fn(); 3] = [
        &|| std::os::unix::fs::symlink(folder.path().join("gone"), &index).unwrap(),
        &|| std::fs::create_dir(&index).unwrap(),
        &|| pipe(&index),
    ];
    for make in makes {
        make();
        match open(folder.path()) {
            Err(Error::Read { what, .. } | Error::Malformed { what, .. })
                if what == index.display().to_string() => {}
            other => panic!("{other:?}"),
        }
        std::fs::remove_file(&index).or_else(|_| std::fs::remove_dir(&index)).unwrap();
    }
    assert_eq!(open(folder.path()), Ok(()));
    let other = folder.path().join("pipe.safetensors");
    pipe(&other);
    assert!(matches!(open(&other), Err(Error::Malformed { .. })));
}
