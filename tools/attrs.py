"""Names that are used as attributes or keywords and defined nowhere in a tree, which were not so in another."""
import ast, subprocess, sys
from collections import defaultdict
def scan(files):
    defined=set(); used=defaultdict(set); kw=defaultdict(set)
    for name,text in files:
        try: t=ast.parse(text)
        except SyntaxError as e: print(name,e); continue
        for n in ast.walk(t):
            if isinstance(n,(ast.FunctionDef,ast.AsyncFunctionDef,ast.ClassDef)): defined.add(n.name)
            elif isinstance(n,ast.arg): defined.add(n.arg)
            elif isinstance(n,ast.Name) and isinstance(n.ctx,ast.Store): defined.add(n.id)
            elif isinstance(n,ast.Attribute):
                (defined.add(n.attr) if isinstance(n.ctx,ast.Store) else used[n.attr].add(f"{name}:{n.lineno}"))
            elif isinstance(n,ast.keyword) and n.arg: kw[n.arg].add(f"{name}:{n.value.lineno}")
            elif isinstance(n,(ast.Import,ast.ImportFrom)):
                for a in n.names: defined.add((a.asname or a.name).split('.')[0])
    return defined,used,kw
def at(rev,root):
    names=[l for l in subprocess.run(['git','ls-tree','-r','--name-only',rev],cwd=root,capture_output=True,text=True).stdout.splitlines() if l.endswith('.py')]
    out=subprocess.run(['git','archive',rev],cwd=root,capture_output=True).stdout
    import io,tarfile
    tar=tarfile.open(fileobj=io.BytesIO(out))
    return [(n,tar.extractfile(n).read().decode()) for n in names]
root=sys.argv[1]; base=sys.argv[2] if len(sys.argv)>2 else 'layout'
old=scan(at(base,root))
from pathlib import Path
now=[(l,(Path(root)/l).read_text()) for l in subprocess.run(['git','ls-files','-co','--exclude-standard','*.py'],cwd=root,capture_output=True,text=True).stdout.splitlines() if (Path(root)/l).is_file()]
new=scan(now)
for which,label in((1,'attribute'),(2,'keyword')):
    for n in sorted(new[which]):
        if n not in new[0] and (n in old[0] or n not in old[which]): print(label,n,sorted(new[which][n])[:4])
