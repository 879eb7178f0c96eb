//! Captures, the graphs that come of them, and what graphs keep.
//!
//! A graph is a list of copies. Instantiating copies the list, launching queues it. A user object counts its
//! references: of the program, of graphs, of executable graphs, and of launches that are not complete. When the last
//! reference is released its destructor is due, and is called, after the call that released it, on another thread.

use std::cell::Cell;
use std::ffi::{c_uint, c_void};

use super::*;
use crate::common::{Vendor, entries, fails_if, thread};
use crate::world::{Capture, Op};

type Destructor = unsafe extern "C" fn(*mut c_void);

#[derive(Clone)]
pub struct Graph {
    nodes: Vec<Op>,
    objects: Vec<usize>,
    capturing: bool,
}

pub struct Object {
    destroy: Destructor,
    pointer: usize,
    references: u64,
}

#[derive(Default)]
pub struct Graphs {
    graphs: BTreeMap<usize, Graph>,
    executables: BTreeMap<usize, Graph>,
    objects: BTreeMap<usize, Object>,
    captures: u64,
    due: Vec<(Destructor, usize)>,
}

thread_local! {
    static DESTRUCTOR: Cell<bool> = const { Cell::new(false) };
}

pub fn is_destructor() -> bool {
    DESTRUCTOR.get()
}

/// Calls the destructors that are due in a world, on a thread of their own, without waiting for it.
pub fn run_due(number: usize) {
    let mut world = Vendor::Cuda.world(number);
    let due = std::mem::take(&mut world.cuda.graphs.due);
    if due.is_empty() {
        return;
    }
    world.cuda.calling += 1;
    drop(world);
    let calls = move || {
        DESTRUCTOR.set(true);
        Vendor::Cuda.enter(number);
        for (destroy, pointer) in due {
            // SAFETY: the call that made the object promised that the two are valid, and the destructor is called once.
            unsafe { destroy(pointer as *mut c_void) };
        }
    };
    std::thread::spawn(move || {
        _ = std::thread::spawn(calls).join();
        let calling = &mut Vendor::Cuda.world(number).cuda.calling;
        *calling = calling.saturating_sub(1);
    });
}

impl Graphs {
    pub fn count(&self) -> [usize; 2] {
        [self.graphs.len() + self.executables.len(), self.objects.len()]
    }
}

impl World {
    pub(crate) fn add_node(&mut self, graph: usize, op: Op) {
        if let (Some(graph), Op::Copy { .. }) = (self.cuda.graphs.graphs.get_mut(&graph), &op) {
            graph.nodes.push(op);
        }
    }

    /// Releases one reference of each of these user objects.
    pub(crate) fn let_go(&mut self, objects: &[usize]) {
        let graphs = &mut self.cuda.graphs;
        for handle in objects {
            let Some(object) = graphs.objects.get_mut(handle) else { continue };
            object.references -= 1;
            if object.references == 0 {
                graphs.due.push((object.destroy, object.pointer));
                graphs.objects.remove(handle);
            }
        }
    }

    fn add_references(&mut self, objects: &[usize]) {
        for handle in objects {
            self.cuda.graphs.objects.entry(*handle).and_modify(|object| object.references += 1);
        }
    }

    /// A graph is destroyed, of either kind; or there is none.
    fn end_graph(&mut self, graph: Option<Graph>) -> Outcome {
        let graph = self.must("GRA-3", INVALID_VALUE, graph)?;
        self.let_go(&graph.objects);
        Ok(())
    }

    /// Answers both forms of the question for a capture, where there are places for the answers. There are no lists of
    /// nodes and edges.
    ///
    /// # Safety
    /// Each pointer is null or valid for a write.
    unsafe fn capture_info(
        &mut self,
        stream: usize,
        status: *mut c_uint,
        id: *mut u64,
        lists: [*mut usize; 4],
    ) -> Outcome {
        let capture = self.stream(stream)?.capture.as_ref();
        let found = capture.map_or((0, 0, 0), |c| if c.spoiled { (2, 0, 0) } else { (1, c.id, c.graph) });
        let [graph, none @ ..] = lists;
        // SAFETY: the caller's promise.
        unsafe {
            self.give(status, found.0)?;
            id.as_mut().into_iter().for_each(|id| *id = found.1);
            graph.as_mut().into_iter().for_each(|graph| *graph = found.2);
            none.iter().filter_map(|place| place.as_mut()).for_each(|place| *place = 0);
        }
        Ok(())
    }
}

entries! {
    Cuda, symbol, also [];

    fn cuStreamBeginCapture_v2(stream: usize, mode: c_uint) in Of(stream), |w| {
        fails_if(INVALID_VALUE, w.stream(stream)?.capture.is_some() || mode > 2)?;
        if stream <= 1 {
            w.not_implicit(stream)?;
            return Err(CAPTURE_UNSUPPORTED);
        }
        let graph = w.fresh();
        let graphs = &mut w.cuda.graphs;
        graphs.graphs.insert(graph, Graph { nodes: Vec::new(), objects: Vec::new(), capturing: true });
        graphs.captures += 1;
        let capture = Capture { mode, thread: thread(), spoiled: false, graph, id: graphs.captures };
        w.stream(stream)?.capture = Some(capture);
        Ok(())
    }

    fn cuStreamEndCapture(stream: usize, graph: *mut usize) in Of(stream), |w| {
        let Some(capture) = w.stream(stream)?.capture.take() else {
            return Err(INVALID_VALUE);
        };
        if capture.mode != 2 && capture.thread != thread() {
            w.stream(stream)?.capture = Some(Capture { spoiled: true, ..capture });
            return w.broken("CAP-4", CAPTURE_WRONG_THREAD);
        }
        w.give(graph, if capture.spoiled { 0 } else { capture.graph })?;
        if capture.spoiled {
            let spoiled = w.cuda.graphs.graphs.remove(&capture.graph);
            w.end_graph(spoiled)?;
            return Err(CAPTURE_INVALIDATED);
        }
        w.cuda.graphs.graphs.entry(capture.graph).and_modify(|graph| graph.capturing = false);
        Ok(())
    }

    fn cuStreamGetCaptureInfo_v2(
        stream: usize,
        status: *mut c_uint,
        id: *mut u64,
        graph: *mut usize,
        nodes: *mut usize,
        count: *mut usize,
    ) in Of(stream), |w| {
        w.capture_info(stream, status, id, [graph, nodes, std::ptr::null_mut(), count])
    }

    /// Without it the older form is used.
    fn cuStreamGetCaptureInfo_v3(
        stream: usize,
        status: *mut c_uint,
        id: *mut u64,
        graph: *mut usize,
        nodes: *mut usize,
        edges: *mut usize,
        count: *mut usize,
    ) in Of(stream), |w| {
        w.capture_info(stream, status, id, [graph, nodes, edges, count])
    }

    fn cuUserObjectCreate(
        object: *mut usize,
        pointer: usize,
        destroy: Option<Destructor>,
        references: c_uint,
        flags: c_uint,
    ) in Here, |w| {
        let destroy = destroy.filter(|_| references > 0 && flags == 1);
        let destroy = w.must("GRA-2", INVALID_VALUE, destroy)?;
        let made = w.fresh();
        w.give(object, made)?;
        w.cuda.graphs.objects.insert(made, Object { destroy, pointer, references: references.into() });
        Ok(())
    }

    fn cuUserObjectRelease(object: usize, count: c_uint) in Of(object), |w| {
        let references = w.cuda.graphs.objects.get(&object).map(|o| o.references);
        let references = w.must("GRA-3", INVALID_VALUE, references)?;
        w.forbid("GRA-4", INVALID_VALUE, u64::from(count) > references || count == 0)?;
        w.let_go(&vec![object; count as usize]);
        Ok(())
    }

    fn cuGraphRetainUserObject(graph: usize, object: usize, count: c_uint, flags: c_uint) in Of(graph), |w| {
        let graphs = &mut w.cuda.graphs;
        let (Some(graph), true) = (graphs.graphs.get_mut(&graph), graphs.objects.contains_key(&object)) else {
            return w.broken("GRA-3", INVALID_VALUE);
        };
        fails_if(INVALID_VALUE, count == 0 || flags > 1)?;
        let all = vec![object; count as usize];
        graph.objects.extend(&all);
        // Or they are the program's own from now on.
        if flags == 0 {
            w.add_references(&all);
        }
        Ok(())
    }

    fn cuGraphInstantiateWithFlags(executable: *mut usize, graph: usize, _flags: u64) in Of(graph), |w| {
        let graph = w.cuda.graphs.graphs.get(&graph).filter(|g| !g.capturing).cloned();
        let graph = w.must("GRA-3", INVALID_VALUE, graph)?;
        let made = w.fresh();
        w.add_references(&graph.objects);
        w.cuda.graphs.executables.insert(made, graph);
        w.give(executable, made)
    }

    fn cuGraphLaunch(executable: usize, stream: usize) in Of(stream), |w| {
        let graph = w.cuda.graphs.executables.get(&executable).cloned();
        let graph = w.must("GRA-3", INVALID_VALUE, graph)?;
        w.stream(stream)?;
        w.add_references(&graph.objects);
        for op in graph.nodes.into_iter().chain([Op::Launched(graph.objects)]) {
            w.submit(stream, op)?;
        }
        Ok(())
    }

    fn cuGraphExecDestroy(executable: usize) in Of(executable), |w| {
        let graph = w.cuda.graphs.executables.remove(&executable);
        w.end_graph(graph)
    }

    fn cuGraphDestroy(graph: usize) in Of(graph), |w| {
        let capturing = w.cuda.graphs.graphs.get(&graph).is_some_and(|graph| graph.capturing);
        w.forbid("GRA-4", INVALID_VALUE, capturing)?;
        let graph = w.cuda.graphs.graphs.remove(&graph);
        w.end_graph(graph)
    }
}
